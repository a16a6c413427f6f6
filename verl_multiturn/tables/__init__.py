"""The papers' tables with our recorded runs beside them; `published/` holds their numbers."""
