-- Name this moment, to which the table can be restored: the newest two marks stay.
-- KEYS[1] stream
-- ARGV    the call `Mark` of redrb/table/calls.py
-- Returns its reply. Repeated, it changes nothing more.
--@include task table writes permissions

check_permissions(gone)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local answer = answer_without(ask)
if answer then
  return cmsgpack.pack(answer)
end
local change = next_changes(1) + 1
local newest, found = -1, redis.call('HGETALL', marks) -- bound: three marks
for i = 1, #found, 2 do
  if found[i] ~= ask.name then
    newest = math.max(newest, tonumber(string.match(found[i + 1], '^%d+')))
  end
end
for i = 1, #found, 2 do
  if tonumber(string.match(found[i + 1], '^%d+')) < newest then
    redis.call('HDEL', marks, found[i])
  end
end
if newest < 0 then
  newest = change
end
redis.call('HSET', marks, ask.name, string.format('%d %d', change, number(task, 'number')))
redis.call('HSET', task, 'kept_from', string.format('%d', newest)) -- rows cleared before that may go
note_done(ask, change, 0)
return cmsgpack.pack({outcome = 'ok', change = change})
