"""One self-contained HTML file of a ``Report``: opens from disk, asks no network, works at 8 and at 10,000 ranks.

    report ─► payload   compact facts, nothing that grows with parameters × ranks ─► JSON within the page
           ─► page      page.html.j2, page.css and the .js files, put into one text

The scripts draw on demand: what a rank holds is worked out from the axes' shares by the rule of ``Recipe.held`` (layout.js;
``tests/test_html.py`` compares the two).
"""
