"""fusco inside the frameworks that people already run.

``deep_ep``: a module of that name with the classes of DeepEP (``Buffer``) and HybridEP (``HybridEPBuffer``) on fusco.
It is not on the path by default: ``export PYTHONPATH=$(fusco integrations --path deep_ep):$PYTHONPATH``.
"""
