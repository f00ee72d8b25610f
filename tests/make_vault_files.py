"""Write the office and PDF files of tests/vault again: python tests/make_vault_files.py

The files are committed; this script says what is in them. With the same library versions (python-docx, openpyxl,
python-pptx, reportlab) it gives the same bytes: dates are fixed, and archives are packed in one order at one time.
"""
import io
import re
import zipfile
from datetime import datetime
from pathlib import Path

import docx
import openpyxl
import pptx
from reportlab.pdfgen.canvas import Canvas

FILES = Path(__file__).resolve().parent / "vault" / "files"
WRITTEN = datetime(2025, 3, 3, 12, 0, 0)


def lease() -> bytes:
    "Word: headings, a list and a table."
    document = docx.Document()
    document.add_heading("Lease of the summit plot", 0)
    document.add_paragraph("Between the parish and the observatory, for ten years from 1 January 2024.")
    document.add_heading("Rent", 1)
    document.add_paragraph("The yearly rent is 240 euro, due on Saint Martin's day.")
    document.add_heading("Duties", 1)
    for duty in ("mow the path twice a year", "keep the well accessible"):
        document.add_paragraph(duty, style="List Bullet")
    table = document.add_table(rows=2, cols=2)
    for cell, text in zip((c for row in table.rows for c in row.cells), ("Year", "Rent", "2024", "240"), strict=True):
        cell.text = text
    return saved(document)


def budget() -> bytes:
    "Excel: two sheets, numbers, a date, a formula without a stored value, an empty row."
    book = openpyxl.Workbook()
    income = book.active
    income.title = "Income"
    received = datetime(2025, 1, 31)
    for row in (["Source", "Euro", "Received"], ["Membership", 1650, received], [], ["Donations", 412.5, None]):
        income.append(row)
    spending = book.create_sheet("Spending")
    for row in (["Item", "Euro"], ["Electricity", 318], ["Insurance", 540], ["Total", "=SUM(B2:B3)"]):
        spending.append(row)
    return saved(book)


def open_night() -> bytes:
    "PowerPoint: two slides, the second with speaker notes."
    deck = pptx.Presentation()
    title = deck.slides.add_slide(deck.slide_layouts[0])
    title.shapes.title.text = "Open night"
    title.placeholders[1].text = "17 May, from nine in the evening"
    route = deck.slides.add_slide(deck.slide_layouts[1])
    route.shapes.title.text = "The tour"
    route.placeholders[1].text = "Saturn first\nThen the double star Albireo"
    route.notes_slide.notes_text_frame.text = "Lower the step for the children before Saturn."
    return saved(deck)


def saved(document) -> bytes:
    "The bytes of an office document: one date inside, and on every member of the archive."
    written, packed = io.BytesIO(), io.BytesIO()
    document.save(written)
    with zipfile.ZipFile(written) as source, zipfile.ZipFile(packed, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "docProps/core.xml":
                data = re.sub(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", f"{WRITTEN:%Y-%m-%dT%H:%M:%SZ}".encode(), data)
            target.writestr(zipfile.ZipInfo(name, WRITTEN.timetuple()[:6]), data, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def seeing_report() -> bytes:
    "PDF: two pages with a text layer."
    buffer = io.BytesIO()
    canvas = Canvas(buffer, invariant=1)
    canvas.setTitle("Seeing report 2024")
    for page in (
        ["Seeing report 2024", "How steady the air was, measured on 118 nights."],
        ["Results", "The median was 2.1 arc seconds.", "The best night was 9 October with 1.2."],
    ):
        for line, text in enumerate(page):
            canvas.setFont("Helvetica", 18 if line == 0 else 12)
            canvas.drawString(72, 770 - 26 * line, text)
        canvas.showPage()
    canvas.save()
    return buffer.getvalue()


MADE = {"lease.docx": lease, "budget.xlsx": budget, "open-night.pptx": open_night, "seeing-report.pdf": seeing_report}

if __name__ == "__main__":
    for name, make in MADE.items():
        (FILES / name).write_bytes(make())
        print(FILES / name)
