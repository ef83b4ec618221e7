"""The generative models that a sub-generator can be: a file each, behind the interface of ``kinds``."""
