-- Find rows by key.
-- KEYS[1] stream
-- ARGV    the call `Look` of redrb/table/calls.py
-- Returns its reply; then the record of each row, '' where there is none
--@include task table

local ask = cmsgpack.unpack(ARGV[1])
local numbered = replies_of('HMGET', keys, ask.keys)
local wanted, found = {}, {}
for i in ipairs(ask.keys) do
  wanted[#wanted + 1] = numbered[i] or nil
end
local records, at = replies_of('HMGET', rows, wanted), 0
for i in ipairs(ask.keys) do
  at = at + (numbered[i] and 1 or 0)
  found[i] = numbered[i] and records[at] or ''
  numbered[i] = tonumber(numbered[i] or '0')
end
local ids = column_ids()
table.insert(found, 1, cmsgpack.pack({numbers = numbered, columns = next(ids) and ids}))
return found
