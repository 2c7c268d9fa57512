"""The certificate of a run on a certified profile: counts of its verdicts, and what the ranks had loaded.

``verdicts.txt`` has a word and a case on each line, in the order of the profile. The word is ``held``, ``refused``, the kind of a
deviation, ``expected CAUSE KIND`` for a known deviation of torch, ``missing`` if the target declares that it lacks what the law needs,
``rejected`` if this torch lacks what the law is about, and ``unsaid`` if there is no verdict for another reason.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardlaw import __version__
from shardlaw.conformance.report.run_report import Certificate, Loaded
from shardlaw.conformance.run.certified_profile import ABSENT, EXPECTED, MISSING, UNSAID, CertifiedProfile

if TYPE_CHECKING:
    from shardlaw.conformance.run.state import RunState

FILE = "verdicts.txt"


def format_verdicts(profile: CertifiedProfile, words: Mapping[str, str]) -> str:
    """The text of ``verdicts.txt``; ``words`` by the text of the case."""
    return "".join(f"{words.get(case.text, UNSAID)} {case.text}\n" for case in profile.cases)


def collect_words(run: RunState) -> dict[str, str]:
    """The word for each case of a run's profile, by its text."""
    words = dict(run.verdict_words)
    for result in run.results.values():
        word = MISSING if set(result.law.needs) & set(run.target.cannot) else UNSAID
        for case in run.certified.laws.get(result.law.id, ()) if run.certified else ():
            words.setdefault(case.text, word)
    return words


def make_certificate(profile: CertifiedProfile, words: Iterable[str], loaded: Loaded, verdicts: str, finished: bool) -> Certificate:
    """Count the ``words`` of the cases; ``verdicts`` is the text of ``verdicts.txt``."""
    from shardlaw.conformance.law.verdict import KINDS

    counts = Counter(EXPECTED if word.startswith(EXPECTED) else "deviating" if word in KINDS else word for word in words)
    found = Certificate(
        profile=profile.name,
        release=profile.release,
        sha256=profile.sha256,
        cases=len(profile.cases),
        held=counts["held"],
        expected=counts[EXPECTED],
        refused=counts["refused"],
        missing=counts[MISSING],
        absent=counts[ABSENT],
        unsaid=counts[UNSAID],
        deviating=counts["deviating"],
        verdicts=hashlib.sha256(verdicts.encode()).hexdigest(),
        loaded=loaded,
    )
    found.passed = finished and not (found.deviating or found.unsaid) and found.held > 0
    return found


def certify_run(run: RunState, exit_code: int | None) -> tuple[Certificate, str] | None:
    """The certificate of a run so far, and the text of ``verdicts.txt``; ``None`` if the run is not certified."""
    if run.certified is None:
        return None
    by_case = collect_words(run)
    text = format_verdicts(run.certified, by_case)
    words = [by_case.get(case.text, UNSAID) for case in run.certified.cases]
    unknown = {"torch": "", "torch_git": "", "python": "", "platform": ""}
    loaded = Loaded(harness=__version__, **(run.loaded or unknown))
    return make_certificate(run.certified, words, loaded, text, exit_code == 0 and bool(run.loaded) and not run.stale), text
