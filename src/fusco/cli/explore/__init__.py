"""A page that shows what moves where and why: one self-contained HTML file, without network and without libraries.

Views are values (``views``) that pure functions make of a plan (``traffic``, ``stages``), of records of a
benchmark (``records``) or of a simulation (``simulation``). ``Page`` puts them, as JSON, between the files of
``assets``, which draw them by hand in SVG and canvas. ``command`` is ``fusco explore``.

Shape symbols: N nodes, R ranks, L layers.
"""
