"""The interactive demo: a page in the browser over live streams, built on the public API of ``streamvid`` only.

``server.build`` makes the web application, ``hub`` holds the models and the limits, ``session`` is one browser tab.
"""
