"""What a run leaves behind: report.json, findings with their scripts, junit.xml, report.md, and what a terminal shows."""
