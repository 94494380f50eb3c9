-- Delete the table, a page of rows at a time; what tasks have claimed was deleted before. Then its mark
-- `left` stays, until its values are deleted: include/table.lua.
-- KEYS[1] stream
-- ARGV    the call `Delete` of redrb/table/calls.py
-- Returns its reply, a page: whether further keys may be left at the end, as of an earlier table
--@include task table runs permissions

check_permissions(gone)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local refused = ask.incarnation and redis.call('HGET', task, 'left') ~= ask.token and refusal(ask)
if refused then
  return cmsgpack.pack(refused)
end
for _, sorted in ipairs({changes, cleared}) do
  local numbered = redis.call('ZRANGE', sorted, 0, PAGE.table_rows - 1)
  if sorted == changes then
    in_parts('HDEL', keys, keys_of(numbered))
    add(task, 'cleared', #numbered)
  end
  in_parts('ZREM', sorted, numbered)
  add(task, sorted == changes and 'bytes' or 'retained_bytes', -delete_rows(numbered, records_of(numbered)))
  if #numbered > 0 then
    return cmsgpack.pack({outcome = 'ok', more = true})
  end
end
local names = {}
for _, kind in ipairs(TABLE_KEYS.table) do
  names[#names + 1] = key(kind)
end
for _, queue in ipairs({'#room', '#watch'}) do
  --@include waiters
  for _, waiter in ipairs(redis.call('ZRANGE', key('queue', queue), 0, PAGE.woken_at_end - 1)) do
    send_wake(waiter)
  end
  for _, kind in ipairs(TABLE_KEYS.queue) do
    names[#names + 1] = key(kind, queue)
  end
end
local claiming = redis.call('HKEYS', key('claims')) -- bound: PAGE.claims
for name in string.gmatch(redis.call('HGET', task, 'resumed') or '', ' (%S+)') do -- bound: PAGE.claims
  claiming[#claiming + 1] = name -- not registered yet
end
for _, name in ipairs(claiming) do
  for _, kind in ipairs(TABLE_KEYS.claim) do
    names[#names + 1] = key(kind, name)
  end
end
local found = redis.call('HMGET', task, 'left', 'beside', 'resumed') -- the last one: tasks not registered yet
redis.call('UNLINK', unpack(names))
redis.call('HSET', task, 'left', ask.token)
return cmsgpack.pack({outcome = 'ok', beside = (found[1] or found[2] or found[3]) and true or false})
