"""What a checkpoint must save and load: nested states, plans and metadata."""
