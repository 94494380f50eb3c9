-- Register a task that claims rows, and let those arrive that are complete already, a page at a time.
-- KEYS[1] stream
-- ARGV    the call `Register` of redrb/table/calls.py; the front and the back of its groups
-- Returns its reply
--@include task table runs claims permissions

check_permissions(gone)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local refused = refusal(ask)
if refused then
  return cmsgpack.pack(refused)
end
local stored = redis.call('HGET', key('claims'), ask.task)
local known = stored and cmsgpack.unpack(stored)
local incarnation = redis.call('HGET', claiming(ask.task) .. 'task', 'incarnation') or ''
if not known then
  if redis.call('HLEN', key('claims')) >= PAGE.claims then
    return cmsgpack.pack({outcome = 'claims'})
  end
  known = {columns = ask.columns, size = ask.size, after = 0, full = false, front = ARGV[2], back = ARGV[3],
    stream = incarnation}
elseif ask.size ~= known.size or table.concat(ask.columns, '\0') ~= table.concat(known.columns, '\0') then
  return cmsgpack.pack({outcome = 'differs', columns = known.columns, size = known.size})
elseif known.stream ~= incarnation then -- its groups were deleted: a `delete` of the table broke off
  for _, kind in ipairs(TABLE_KEYS.claim) do
    redis.call('UNLINK', key(kind, ask.task))
  end
  known.after, known.full, known.stream = 0, false, incarnation
end
if not known.full then
  local row_keys, numbered, newest = {}, page_of(known.after, '+inf')
  table.sort(numbered) -- in the order in which they were added, as far as a page goes
  for i, packed in ipairs(replies_of('HMGET', tags, numbered)) do
    row_keys[i] = packed and cmsgpack.unpack(packed)['']
  end
  local complete, complete_keys = complete_for(known, column_ids(), numbered, row_keys, columns_of(numbered))
  if #complete > 0 then
    arrive(ask.task, known, complete, complete_keys)
  end
  known.after, known.full = newest, #numbered < PAGE.table_rows
  redis.call('HSET', key('claims'), ask.task, cmsgpack.pack(known))
end
return cmsgpack.pack({outcome = 'ok', columns = known.columns, size = known.size, more = not known.full})
