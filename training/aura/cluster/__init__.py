"""Who trains together, and how they talk: place, process group, ranks. Knows no model."""
