"""What a law, a case and a verdict are: plain data, and the notations that cases are written in."""
