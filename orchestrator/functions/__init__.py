"""Functions of a program as tools: conversion of foreign tool objects, and execution in this process."""
