-- Remove rows: deleted, or retained until they are older than the mark before the newest one. Without a mark
-- none is retained: a later mark does not need rows that were cleared before it.
-- KEYS[1] stream
-- ARGV    the call `Clear` of redrb/table/calls.py
-- Returns its reply, a page. Repeated, it changes nothing more.
--@include task table writes permissions

local ask = cmsgpack.unpack(ARGV[1])
local answer = answer_without(ask)
if answer then
  return cmsgpack.pack(answer)
end
check_permissions(gone) -- of a user who may put alone, too: docs/reference/security.md
begin_writing()
local numbered, row_keys, more = {}, {}, false
if ask.all_until >= 0 then
  numbered = redis.call('ZRANGEBYSCORE', changes, '-inf', string.format('%d', ask.all_until), 'LIMIT', 0,
    PAGE.table_rows)
  row_keys = keys_of(numbered)
  more = #numbered == PAGE.table_rows
else
  for i, found in ipairs(replies_of('HMGET', keys, ask.keys)) do
    if found then
      numbered[#numbered + 1], row_keys[#row_keys + 1] = found, ask.keys[i]
    end
  end
end
local count, removed, later, bytes = #numbered, {}, {}, 0
local change, records = next_changes(count), records_of(numbered)
for i, number_of in ipairs(numbered) do
  removed[2 * i - 1], removed[2 * i] = change + i, row_keys[i]
  later[2 * i - 1], later[2 * i] = change + i, number_of
  bytes = bytes + bytes_of_row(records[i])
end
local retained = redis.call('HGET', task, 'retain') == 'checkpoint' and redis.call('EXISTS', marks) == 1
if count > 0 and redis.call('EXISTS', key('claims')) == 1 then
  --@include claim_ends
  end_claims(numbered, retained)
end
in_parts('HDEL', keys, row_keys)
in_parts('ZREM', changes, numbered)
in_parts('ZADD', gone, removed)
trim_gone()
add(task, 'cleared', count)
add(task, 'bytes', -bytes)
if retained then
  in_parts('ZADD', cleared, later)
  add(task, 'retained_bytes', bytes)
else
  delete_rows(numbered, records)
end
note_done(ask, change + count, count)
wake_table(true)
return cmsgpack.pack({outcome = 'ok', change = change + count, count = count, more = more,
  trash = redis.call('EXISTS', trash) == 1})
