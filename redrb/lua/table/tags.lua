-- List the rows that changed after a change, and the keys that went. The last page completes what the table
-- held at its moment: rows that changed while pages were read are on later pages once more.
-- KEYS[1] stream
-- ARGV    the call `Tags` of redrb/table/calls.py
-- Returns its reply, a page; then the tags of its rows
--@include task table

local ask = cmsgpack.unpack(ARGV[1])
local change, gone_until = unpack((numbers(task, 'change', 'gone_until')))
local after, whole, removed = ask.after, ask.whole, {}
local since = ask.seen < 0 and after or ask.seen
local unknown = since < gone_until or since > change -- nobody knows what was removed since
local begins = ask.seen < 0 or unknown
if begins then
  whole = unknown
  after = whole and 0 or after
end
local numbered, newest = page_of(after, '+inf')
if not (begins and whole) then
  -- bound: PAGE.gone_kept
  removed = redis.call('ZRANGEBYSCORE', gone, '(' .. string.format('%d', since), '+inf', 'LIMIT', 0,
    PAGE.gone_kept)
end
local more = #numbered == PAGE.table_rows
local known = replies_of('HMGET', tags, numbered)
return {cmsgpack.pack({more = more, after = more and newest or change, seen = change,
  begins = begins, whole = whole, gone = removed}), unpack(known)}
