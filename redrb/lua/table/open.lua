-- Create the table, or check that it has these settings. Removes old records of writers. For a user who may
-- only read, a table that is there is opened, and nothing is written.
-- KEYS[1] stream
-- ARGV    the call `Open` of redrb/table/calls.py
-- Returns its reply
--@include task table producers permissions

local ask = cmsgpack.unpack(ARGV[1])
local created = not has_table()
if created and not ask.create then
  return cmsgpack.pack({outcome = 'unknown'})
end
local reads_only = forbidden_command(KEYS[1]) and true or false
if created then
  check_permissions(KEYS[1])
end
if not reads_only then
  begin_writing()
end
local differing, names = {}, {'limit', 'max_bytes', 'retain'}
for _, name in ipairs(names) do
  local stored = redis.call('HGET', task, name)
  if ask.given[name] and not created and (stored or '') ~= ask.given[name] then
    differing[name] = stored or ''
  end
end
if next(differing) then
  return cmsgpack.pack({outcome = 'differs', settings = differing})
end
if created then
  local left = redis.call('HGET', task, 'left')
  if left then
    redis.call('HDEL', task, 'left')
    redis.call('HSET', task, 'beside', left)
  end
  redis.call('HSET', task, 'incarnation', ask.incarnation, 'number', '0')
  redis.call('HSET', task, 'gone_until', string.format('%.0f', next_changes(1) + 1))
  for name, value in pairs(ask.given) do
    redis.call('HSET', task, name, value)
  end
end
if not reads_only then
  if ask.in_run > number(task, 'run') then -- Redis has lost the number of the run
    redis.call('HSET', task, 'run', ask.in_run)
  end
  remove_records(server_ms())
end
local settings = redis.call('HMGET', task, unpack(names))
return cmsgpack.pack({outcome = 'ok', incarnation = redis.call('HGET', task, 'incarnation'),
  run = number(task, 'run'), epoch = number(puts, 'epoch'), reads_only = reads_only, settings = {
    limit = settings[1] or '', max_bytes = settings[2] or '', retain = settings[3] or ''}})
