-- Count the rows that have all of some columns, a page at a time.
-- KEYS[1] stream
-- ARGV    the call `Produced` of redrb/table/calls.py
-- Returns the page
--@include table records

local ask, found, ids = cmsgpack.unpack(ARGV[1]), 0, column_ids()
local numbered, newest = page_of(ask.after, '+inf')
for _, had in ipairs(columns_of(numbered)) do
  local whole = true
  for _, column in ipairs(ask.columns) do
    whole = whole and ids[column] and has_column(had, ids[column])
  end
  found = found + (whole and 1 or 0)
end
return cmsgpack.pack({found = found, after = newest, more = #numbered == PAGE.table_rows})
