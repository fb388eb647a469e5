"""Where Q/DQ pairs may stand, by which rules, and how a placement becomes a model and is read back."""
