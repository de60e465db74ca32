"""The complete set of operations in torch: what runs where nothing faster does, and the reference of the others."""
