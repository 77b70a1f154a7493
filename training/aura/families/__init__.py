"""What a kind of model is to the plan, the optimizer and the export: a file for each. Standard library only."""
