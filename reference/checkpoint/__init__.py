"""What a checkpoint must hold and give back: nested states, plans, metadata, and the boxes that they speak of."""
