-- Says whether the limits of a task let a put in.
--@include task clock facts capacity waiters

-- Room for a producer's put of so many groups and bytes. Returns the reply of the put
-- if there is none, or nil; the groups that may follow, -1 without a limit; and the time if it was read.
local function find_room(producer, count, bytes)
  local rule = rules()
  local now = now_ms()
  if (rule.limit > 0 and count > rule.limit) or (rule.max_bytes > 0 and bytes > rule.max_bytes)
    or (rule.max_waiting > 0 and count > rule.max_waiting) then
    return {outcome = 'never'}
  end
  local left = -1
  if rule.limit > 0 then
    left = rule.limit - redis.call('XLEN', stream)
    if left < reserved_before('#room', producer, now, left, count) then
      return {outcome = 'full', setting = 'limit'}
    end
  end
  if rule.max_waiting > 0 then
    local allowed = waiting_left(rule.max_waiting, count)
    if allowed < reserved_before('#room', producer, now, allowed, count) then
      return {outcome = 'full', setting = 'max_waiting'}
    end
    left = left < 0 and allowed or math.min(left, allowed)
  end
  if rule.max_bytes > 0 and number(task, 'bytes') + bytes > rule.max_bytes then
    return {outcome = 'full', setting = 'max_bytes'}
  end
  return nil, left, now
end
