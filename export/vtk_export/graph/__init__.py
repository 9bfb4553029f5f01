"""ONNX graphs: conversion, precision, preprocessing and rewriting."""
