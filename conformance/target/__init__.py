"""The targets that are known here: built in, described by a user, offered by packages; and what they can do."""
