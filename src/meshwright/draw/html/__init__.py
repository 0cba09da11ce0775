"""One self-contained HTML file of a ``Report``: opens from disk, needs no network, works with 8 and with 10,000 ranks.

    report ─► payload   compact facts, whose size does not grow with parameters × ranks ─► JSON within the page
           ─► page      page.html.j2, page.css and the .js files, joined into one text

The scripts compute what a rank holds when it is shown, by the rule of ``Recipe.held`` (layout.js; ``tests/test_html.py``
compares both).
"""
