"""All that a law sees of the rank that it runs on."""
