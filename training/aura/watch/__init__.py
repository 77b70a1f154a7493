"""What looks at runs, nodes and GPUs from outside, and tells a person. See docs/architecture.md."""
