"""Who trains together, and how they talk: place, gang, ranks. Knows no model."""
