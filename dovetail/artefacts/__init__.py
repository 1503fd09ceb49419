"""Artefacts: joint graphs as data on disk. Nothing in a file is executed by being read.

:mod:`.export` writes, :mod:`.load` reads; :mod:`.arguments` and :mod:`.specs` encode and decode parts.
:mod:`.files` is the folder, :mod:`.schema` the form of the document, :mod:`.allow_list` has the operators that it may name.
"""
