"""A user's own model, whole and sharded, step by step: where does the sharded one first become another model?"""
