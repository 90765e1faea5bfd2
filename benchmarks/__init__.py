"""What the product costs beside its floor and its peers: `scripts/bench`, docs/testing.md."""
