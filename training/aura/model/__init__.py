"""The networks, their loss, and what is done with a trained one."""
