"""fusco inside the frameworks that people already run.

``deep_ep``: the classes of DeepEP (``Buffer``, ``EPBuffer``) and HybridEP (``HybridEPBuffer``) on fusco. Programs find
them under that name as a module of the folder ``path``, which is not on the path by default: ``export
PYTHONPATH=$(fusco integrations --path deep_ep):$PYTHONPATH``.
"""
