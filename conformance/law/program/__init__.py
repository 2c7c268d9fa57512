"""Programs of steps: the notation in which a case says what is called."""
