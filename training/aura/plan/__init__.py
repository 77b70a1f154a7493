"""What a training needs, before it starts: memory, floating-point operations, time; and the table of GPUs."""
