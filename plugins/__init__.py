"""The tree operations: what runs inside or right beside an engine. Knows no model and no file format."""
