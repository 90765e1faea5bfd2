"""The egress proxy: the only way out of sandboxes whose class has one, by the rules of their tenant
(docs/images.md).
"""
