"""The plan of a run, the shapes of models, meshes and shards, and the rules that need them; without torch."""
