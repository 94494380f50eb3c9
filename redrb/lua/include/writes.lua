-- Recognizes calls that were done before: the hash puts holds the last operation of each writer, as of each
-- producer of a task: "<operation> <change> <rows> <epoch>".
--@include task runs

-- The reply to an operation that must not change the table, or has done so before, or may have; or nil.
local function answer_without(ask)
  local record, epoch = unpack(redis.call('HMGET', puts, ask.writer, 'epoch'))
  local operation, change, count = string.match(record or '', '^(%d+) (%d+) (%d+)')
  local refused = refusal(ask)
  if operation and tonumber(operation) >= ask.operation and not (refused and refused.outcome == 'gone') then
    return {outcome = 'again', change = tonumber(change), count = tonumber(count)}
  elseif refused or record then
    return refused
  end
  --@include epochs
  return may_be_forgotten(ask.epoch, epoch) and {outcome = 'forgotten', epoch = tonumber(epoch or '0')}
end

local function note_done(ask, change, count)
  redis.call('HSET', puts, ask.writer,
    string.format('%d %d %d %s', ask.operation, change, count, redis.call('HGET', puts, 'epoch') or '0'))
end
