"""An OpenAI-compatible model server that plays a script or a recording, for end-to-end, chaos and benchmark runs. See
tests/model_server/script.py.
"""
