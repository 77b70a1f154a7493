"""What a model can do, by the tasks of EleutherAI's lm-evaluation-harness."""
