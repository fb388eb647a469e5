"""Where Q/DQ pairs may stand, placement rules, placements written as models, and Q/DQ models read back."""
