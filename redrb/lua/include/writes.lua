-- Recognizes calls that were done before: the hash puts holds the last operation of each writer, as of each
-- producer of a task: "<operation> <change> <rows> <epoch>".
--@include table runs

-- Whether this operation of a writer was done before, or may have been: the reply, or nil.
local function repeated(ask)
  local record, epoch = unpack(redis.call('HMGET', puts, ask.writer, 'epoch'))
  if not record then
    --@include epochs
    return may_be_forgotten(ask.epoch, epoch) and {outcome = 'forgotten', epoch = tonumber(epoch or '0')}
  end
  local operation, change, count = string.match(record, '^(%d+) (%d+) (%d+)')
  if tonumber(operation) >= ask.operation then
    return {outcome = 'again', change = tonumber(change), count = tonumber(count)}
  end
end

local function note_done(ask, change, count)
  redis.call('HSET', puts, ask.writer,
    string.format('%d %d %d %s', ask.operation, change, count, redis.call('HGET', puts, 'epoch') or '0'))
end
