"""Instructions of statements that few models have: classes, ``match``, ``except*``, type parameters."""
