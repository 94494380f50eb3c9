-- List the rows that changed after a change, and the keys that went.
-- KEYS[1] stream
-- ARGV    the call `Tags` of redrb/table/calls.py
-- Returns its reply, a page; then the tags of its rows
--@include table

local ask = cmsgpack.unpack(ARGV[1])
local state = numbers(task, 'change', 'gone_until')
local after, until_change, whole = ask.after, ask.until_change, ask.whole
if until_change < 0 then -- the first page
  until_change = state[1]
  whole = after < 0 or after < state[2] or after > state[1]
  after = whole and 0 or after
end
local range = {'(' .. string.format('%d', after), string.format('%d', until_change)}
local found = redis.call('ZRANGEBYSCORE', changes, range[1], range[2], 'WITHSCORES', 'LIMIT', 0,
  PAGE.table_rows)
local numbered, removed, last = {}, {}, until_change
for i = 1, #found, 2 do
  numbered[#numbered + 1] = found[i]
end
local more = #numbered == PAGE.table_rows
last = more and tonumber(found[#found]) or last
if not whole then
  -- bound: PAGE.gone_kept
  removed = redis.call('ZRANGEBYSCORE', gone, range[1], string.format('%d', last), 'LIMIT', 0, PAGE.gone_kept)
end
local known = replies_of('HMGET', tags, numbered)
return {cmsgpack.pack({more = more, after = last, until_change = until_change, whole = whole, gone = removed,
  incarnation = redis.call('HGET', task, 'incarnation') or ''}), unpack(known)}
