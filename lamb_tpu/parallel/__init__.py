"""The device mesh, the sharding of arrays over the mesh, and the compiled steps."""
