"""The tables of the documentation that the code knows: ``python -m tests.pages`` writes them.

A page marks the place of each with two comments, and what stands between them is the code's:

    <!-- generated: NAME -->
    <!-- end -->

``parts.py`` has the names. ``tests/test_pages.py`` fails when a page is not what would be written.
"""
