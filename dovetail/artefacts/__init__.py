"""Artefacts: joint graphs as data on disk. Nothing in a file is executed by being read.

:mod:`.export` writes, :mod:`.load` reads. Each kind of data has a module that encodes and decodes it: :mod:`.descriptors`,
:mod:`.arguments`, :mod:`.size_expressions`, :mod:`.specs`, :mod:`.results`. :mod:`.files` is the folder, :mod:`.schema` the form of
the document, :mod:`.allow_list` has the operators that it may name.
"""
