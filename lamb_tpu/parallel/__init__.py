"""Where arrays live and where work runs: the mesh, and the steps compiled for it."""
