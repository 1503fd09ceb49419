"""The public face: what ``dovetail.compile``, ``capture`` and ``explain`` do, stage by stage."""
