"""Targets: the built-in ones, those in a user's config file, those of installed packages; and a probe of what they can do."""
