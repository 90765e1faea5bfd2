"""How a sandbox is started and removed. The only folder that imports docker."""
