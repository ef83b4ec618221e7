"""Labelled image sets and the streams that clients meet them in; needs no torch, so devices and simulator share it."""
